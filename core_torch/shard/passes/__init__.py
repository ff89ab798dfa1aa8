"""Passes over traced graphs: graph to graph, one idea each, every name in the graph itself."""
