"""The command line of the simulator: one kernel of a .cu file, profiled or checked."""
