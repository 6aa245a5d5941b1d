"""Texts that ship with the package, as files beside this one."""
