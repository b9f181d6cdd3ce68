"""Devices: the mesh, and the processes of a run."""
