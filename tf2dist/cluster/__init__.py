"""Who exists and where: TF_CONFIG, host lists and ranks as one checked value. Never imports TensorFlow."""
