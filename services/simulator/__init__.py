"""The cluster in virtual time: the services' own cores, timed engines and other systems' rules under one event heap."""
