"""Every message of a connect and of a refit, in the order in which they travel.

Members post payloads under keys within a transaction (`reshard.comm.group`). Each message is a
record with its encoding and the checks that its reader makes before it allocates, reads or writes
anything by it. A check raises a ReshardError that names the member, the tensor and what is out of
bounds.

    key                 from, to            record
    connect
    hello               all, all            greeting.Greeting         who takes part, its version and its options
    device              all, all            greeting.DeviceInfo       where a side computes, once made; NIXL, RDMA, TP
    model               engines, all        greeting.one_config       the served model's published config
    held, parts         trainers, engines   held.HeldTensors          what each local tensor holds of the published ones
    facts               trainers, engines   facts                     what belongs to the weights beside them
    pieces/RANK         engines, trainers   requests.PieceRequest     which pieces are wanted, as what
    takes               engines, engines    stages.TakenTensors       what each takes by its loader alone
    regions, memory     trainers, engines   memory.TrainerMemory      where the shards lie, and what can be mapped
    cuts                trainers, engines   cuts                      where pieces are cut to be alike, if anywhere
    alike, sets/RANK    trainers, engines   relays.Alike              who wants which pieces alike, if they may relay
    asked               trainers, engines   requests.RequestsRead     digests of what was asked for, and of cuts
    unmapped            all, all            memory.exchange_unmapped  which memory an engine could not map, and why
    partners/TRANSPORT  all, all            buckets                   how many partners each has
    relays              all, all            buckets                   how far the largest pieces are passed on
    rounds              all, all            buckets                   how many buckets each round takes
    refit
    sync                trainers, trainers  nothing                   pending parameters are about to be gathered
    (prepare)           all, all            comm's Prepare            the version; note: digest of a trainer's memory
    delta               all, all            deltas.DeltaState         with deltas: which refit's weights each has
    regions, memory     trainers, engines   memory.TrainerMemory      only where they have moved
    lines/TRANSPORT     in lines            slab.LineLoad             by which slots are cut (at connect, too)
    slab/TRANSPORT      in pairs            slab.SlabLocation         where pieces are packed (NIXL: at connect, too)
    packed/RANK/LINE    in pairs            a count                   how many rounds of a line a slab has had
    taken/RANK/LINE     in pairs            a count                   how many rounds of a line are taken
    digests/RANK        trainers, engines   verification              of every piece, where verification is asked for
    moved               all, all            nothing                   all bytes have moved; a verification begins
    served              engines, engine     reporting.digest          sums of the boxes that a rank serves
    digest              all, all            reporting.digest          what they add to, from the engines' first rank
    (commit)            all, all            comm's Commit

A message that is valid, but not what its sender sent, is found by the answer to it: whoever asks
says what it has read (`encoding.digest`), and is told what was asked for.
"""
