"""Many jobs of a team on one cluster: nodes, policies of a scheduler, their simulation, and the smallest order."""
