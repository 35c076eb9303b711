"""Learning quality on one machine: real inner steps of small models in the simulation's virtual time."""
