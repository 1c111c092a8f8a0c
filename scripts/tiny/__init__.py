"""The makers of the pair of small checkpoints in `recipes/checkpoints` and of the dialogues in `calibration`."""
