"""The command line: demo, explain, bench, validate, doctor.

Each sub-command has a module of its own, which loads mpi4py only when it runs.
"""
