"""algorithm=local_sgd: synchronous workers that train copies of their own and average them now and then.

T. Lin, S. U. Stich, K. K. Patel, M. Jaggi: Don't Use Large Mini-Batches, Use Local SGD, arXiv 1808.07217, 2018. In a
round each worker takes `algorithm.local_steps` steps on its own batches with its own optimizer. Then all of them take
over the mean of their variables, each weighted by the examples that it has seen in the round (as in B. McMahan, E.
Moore, D. Ramage, S. Hampson, B. Aguera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017). With one step and an optimizer that is linear in the gradient, such as SGD and momentum, that is
plain synchronous training. With any other optimizer it is not, since the mean of Adam's updates is not Adam's update
for the mean gradient; so `twins` takes the graph of plain training for rounds of one step.

The mean is that of all variables: the weights, other state such as moving averages, and the slots of the optimizer,
which the authors above leave as they are on each worker. After a round all workers are therefore equal, and a
checkpoint of one of them continues the run exactly. A constraint of Keras is applied in each step, as always, and to
the mean. Gradients are clipped by each worker for itself.

An outer optimizer may move the weights further than to their mean (DiLoCo: A. Douillard, Q. Feng, A. A. Rusu, R.
Chhaparia, Y. Donchev, A. Kuncoro, M. Ranzato, A. Szlam, J. Shen: DiLoCo: Distributed Low-Communication Training of
Language Models, arXiv 2311.08105, 2023); see `outer`.

A run evaluates, saves, calls callbacks and stops only after a round. A round that would go beyond such a step, or the
end of an epoch, is shorter. So the rounds follow from the options alone, also in a run that was stopped and resumed.
"""
