"""What is kept of a training run, so that it goes on anywhere: any number of workers, cut and schedule."""
