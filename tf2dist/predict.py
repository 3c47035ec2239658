"""``python -m tf2dist.predict RUN_DIR [FILE ...] [data=NAME] [step=N] [plugins=[FILE.py]]``

Prints what the model of a run says of each example, one a line, separated by tabs. For a classifier that is the
class, its probability and the file; for other models the outputs and the file.

A FILE is an image (PNG, JPEG, BMP or GIF, of which the first picture counts) or an array of numpy (.npy). Images
become grey if the model takes one channel, and are resized to the model's height and width, whatever their own
proportions: as in the data, the drawing must fill the picture in the same way, in the same colours (MNIST has white
digits on black). Arrays have the shape of one example or of several, with values as the run's data has them: of
images from 0 to 255.

Without a FILE the model is shown the test set of the run, or of data=NAME. For a classifier the accuracy and the
confusion matrix are printed (a row for each class, a column for each prediction) and drawn in RUN_DIR/confusion.png;
of images, the 36 most confident mistakes and a few right ones in RUN_DIR/predictions.png. Of other models the outputs
are printed; a curve of one input and one output is drawn in RUN_DIR/regression.png, over the points of the test set.

With step=N it takes the weights of that checkpoint. A model or data with code of your own needs the files in which
that is: plugins=[FILE.py].
"""

from tf2dist.tools.finished.predict_command import main

# Nothing imports this module: the package has the function `tf2dist.predict` in place of it.
if __name__ == "__main__":
    main(__doc__)
