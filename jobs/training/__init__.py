"""The parts of jobs/train.py. They use mpicoll's public names only."""
