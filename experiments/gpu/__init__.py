"""What only a GPU can say: simulator against hardware, and times. ``python -m experiments.gpu_report`` does it all."""
