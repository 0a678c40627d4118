"""A fleet in virtual time: the coordinator's own code among members and a network that fail.

``simulator`` runs a course; its members, time and faults are models, and ``findings`` is what a
course comes to. Nothing of the service imports any of it.
"""
