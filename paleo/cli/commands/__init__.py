"""One file for each command, or family of commands: found by folder."""
