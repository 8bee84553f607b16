"""The parts that commands share: arguments, and text that is safe to show in a terminal."""
