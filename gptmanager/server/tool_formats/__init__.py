"""Tools of a request, and the formats of tool calls: a parser and a grammar for each."""
