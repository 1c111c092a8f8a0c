"""Tool calls: what a request allows (`choice`), how models write calls (`dialects`), calls in a stream (`parser`)."""
