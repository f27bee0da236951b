"""NeMo-RL's script, run with refits. What Ray pickles has to be of a module that others can import."""

from reshard.integrations.nemo_rl.script import main

main()
