"""What every room may see: ids, errors, names, messages and ports. Standard library only."""
