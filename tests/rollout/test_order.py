"""Which episode begins next when more wait than are decoded together."""

from pipelines.rollout.engine import EpisodeQueue


def order(questions, lengths, live, longest_first=True):
    """The order in which episodes begin, when one token of each of `live` is decoded at a time."""
    queue, left, begun = EpisodeQueue(questions, longest_first), {}, []
    while True:
        while len(left) < live and (index := queue.next()) is not None:
            begun.append(index)
            left[index] = lengths[index]
        if not left:
            return begun
        step = min(left.values())
        for index in list(left):
            left[index] -= step
            if not left[index]:
                del left[index]
                queue.over(index, lengths[index])


def test_the_first_of_each_question_begins_and_then_those_of_the_longest():
    questions, lengths = ["a"] * 3 + ["b"] * 3 + ["c"] * 3, [2, 2, 2, 5, 5, 5, 3, 3, 3]
    # 0 and 3 run; 0 ends, 6 begins; at token 5 both 3 and 6 are over: b's mean of 5 leads, then c's 3, then a's 2.
    assert order(questions, lengths, live=2) == [0, 3, 6, 4, 5, 7, 8, 1, 2]


def test_a_question_whose_first_episode_is_not_over_counts_as_the_longest():
    questions, lengths = ["a", "a", "b", "b"], [1, 1, 9, 9]
    assert order(questions, lengths, live=2) == [0, 2, 3, 1]


def test_a_policy_that_decodes_in_this_process_keeps_the_order_of_its_requests():
    questions = ["a", "a", "b", "b"]
    assert order(questions, [1, 1, 9, 9], live=1, longest_first=False) == [0, 1, 2, 3]


def test_fewer_episodes_than_are_decoded_together_all_begin_at_once():
    assert sorted(order(["a", "a", "b"], [1, 2, 3], live=8)) == [0, 1, 2]
