"""The calls of a fleet's clients: each prompt runs on one member, and on another if that one fails.

``router`` chooses by what a prompt is known by (``beginning``) and by what members report of other
fronts' calls; ``hold`` is what keeps calls waiting: members that are paused or asleep.
"""
