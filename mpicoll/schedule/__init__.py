"""Collectives as data: the form of a schedule, its proof, its cost and its picture.

Nothing in this package imports mpi4py, and nothing in it needs an MPI.
"""
