"""What each command does, as functions of Python.

`import allattn` offers them, and the command line calls them. The modules here put the other
packages together and check arguments; none imports torch until a function needs it.
"""
