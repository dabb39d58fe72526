"""The laboratory: data, models, experiments, command line and reports around rkfac."""
