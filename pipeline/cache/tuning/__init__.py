"""Which threshold and which checks a semantic cache should use: from labelled pairs, within a budget of wrong hits."""
