"""The command line of the simulator: one kernel of a file, profiled or checked."""
