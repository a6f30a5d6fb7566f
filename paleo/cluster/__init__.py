"""Many jobs of a team on one cluster: nodes, scheduling policies, their simulation, and the smallest order of nodes."""
