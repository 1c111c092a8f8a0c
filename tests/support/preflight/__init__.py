"""Cases of preflight's rules: both sides of the edge of each, and what makes a case."""
