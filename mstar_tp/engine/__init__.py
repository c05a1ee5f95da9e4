"""One rank's engine: scheduling, steps, sampling, CUDA graphs and the resources steps need."""
