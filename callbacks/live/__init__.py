"""The live page: a manager's schedule in a browser."""
