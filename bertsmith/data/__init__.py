"""From text files to training examples, in numpy. It never knows of torch or of a model."""
