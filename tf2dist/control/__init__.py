"""The meeting of many hosts: who is who, do they agree, who was lost. Never imports TensorFlow."""
