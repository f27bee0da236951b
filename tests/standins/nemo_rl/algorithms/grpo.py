"""In the place of how NeMo-RL starts a run."""


def setup(master_config, tokenizer, dataset, val_dataset, processor=None, policy_factory=None):
    raise NotImplementedError("a stand-in starts nothing")


def compute_and_apply_seq_logprob_error_masking(train_data, rewards, seq_logprob_error_threshold):
    train_data["sample_mask"] = train_data["sample_mask"] * 0  # as if all were beyond the threshold
    return {"num_masked_seqs": len(rewards)}
