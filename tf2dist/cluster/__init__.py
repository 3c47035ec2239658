"""Who exists and where: TF_CONFIG and host lists as one checked value. Never imports TensorFlow."""
