"""Checking: does a kernel compute what the layer computes, and is it faster here? Told by the layer's own inputs."""
