"""What allattn finds on this machine: versions, devices, compiler, speed."""
