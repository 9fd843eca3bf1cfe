"""Schedules replayed under LogGP on a described machine, at sizes no test machine has.

Nothing in this package imports mpi4py, and nothing in it needs an MPI.

A replay goes in levels. In each, every rank whose step has begun exchanges the messages of
which both ends are posted; those messages are taken to be under way together and share the
links on their way. The clocks of the ranks follow LogGP from there, in whole ticks, so that
what symmetry saves is exact: `lockstep` and `replay` give the same ticks.
"""
