"""Who exists and where: TF_CONFIG, host lists, ranks and SLURM as one checked value. Never imports TensorFlow."""
