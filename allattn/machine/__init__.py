"""Looks at the machine: versions, devices, compiler, speed."""
