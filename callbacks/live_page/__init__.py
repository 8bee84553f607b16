"""The live page: shows a manager's schedule in a browser."""
