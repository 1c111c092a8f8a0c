"""GPU memory of a deployment, rank by rank."""
