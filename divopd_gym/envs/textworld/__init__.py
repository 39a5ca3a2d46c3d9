"""TextWorld: its generated games, made on the spot, and any game file."""
