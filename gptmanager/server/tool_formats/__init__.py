"""Tools of a request, and formats of tool calls. Each format has a parser and a grammar."""
