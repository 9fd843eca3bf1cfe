"""What touches MPI and memory: buffers, operators, the executor, the link."""
