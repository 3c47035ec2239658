"""The private names of TensorFlow and Keras that this project uses, each behind a function with a name of ours.

Another release may rename any of it, and an assignment to an attribute that nobody reads any more has no effect. So
each function checks that what it touches exists and has the expected type; all of them raise `InstallationError`,
which gives the name and the installed version. `probes.missing` tries the central ones.
"""
