"""Engines that the front starts itself: ``replicas`` keeps so many of them running.

A launcher starts each as a process, beside the front or on a Ray cluster, where engines may outlive
their front.
"""
