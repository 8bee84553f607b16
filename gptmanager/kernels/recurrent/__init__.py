"""Linear attention with a state: the gated delta rule."""
