"""What a region must find again when it is rerun: random streams, ambient modes, its inputs."""
