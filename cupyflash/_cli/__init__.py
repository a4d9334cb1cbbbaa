"""The command line: attention on files, and the kernels as source, PTX and cubin."""
