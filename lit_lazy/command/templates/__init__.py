"""The files that `lit-lazy new` writes: examples that run as they are, with what to change in comments."""
