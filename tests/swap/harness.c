/* The kernels and their pool without Python, for the sanitizers: several threads call them at once
 * while another changes the instruction set under them and children are forked, and everything is
 * compared with what one thread gives.
 *
 * harness ROUNDS CHILDREN: exits with 0 when all is well, else tells on stderr what is not.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels.h"

#define NUM_CALLERS 3
#define NUM_THREADS 4
#define MOST 150001 /* elements: pieces for all threads, the last one not whole */
#define SCALES (MOST / SWAP_MOMENT_BLOCK + 1)

/* What one step of Adam changes. */
struct state {
    float weight[MOST], rest[MOST], exp_avg[MOST], exp_avg_sq[MOST];
    float exp_avg_scale[SCALES], exp_avg_sq_scale[SCALES];
};

struct arrays {
    struct state state, aside; /* the latter of a step from the former */
    float grad[MOST], copy[MOST], merged[MOST];
    uint16_t hi[MOST];
    int16_t lo[MOST];
    double sum;
};

static int rounds;
static atomic_int callers_left;

static void check(int holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

static float next_value(uint32_t *random) {
    *random = *random * 1664525u + 1013904223u;
    return (float)(*random >> 8) / (float)(1 << 24);
}

/* All of it, so that what a kernel leaves alone is compared too. */
static void fill(struct arrays *arrays, uint32_t seed) {
    float *values = (float *)arrays;
    for (size_t i = 0; i < sizeof *arrays / sizeof *values; i++)
        values[i] = next_value(&seed) - 0.5f;
    /* One byte each for kernels that keep moments in eight bits; second moments have no sign. */
    for (size_t i = 0; i < MOST; i++)
        arrays->state.exp_avg_sq[i] = next_value(&seed);
    for (size_t i = 0; i < SCALES; i++)
        arrays->state.exp_avg_scale[i] = arrays->state.exp_avg_sq_scale[i] = 0.01f;
    arrays->aside = arrays->state;
    arrays->sum = 0.0;
}

static struct swap_adam job_of(struct arrays *arrays, struct state *state, int64_t n, int kind) {
    return (struct swap_adam){
        .weight = state->weight,
        .rest = state->rest,
        .exp_avg = state->exp_avg,
        .exp_avg_sq = state->exp_avg_sq,
        .exp_avg_scale = state->exp_avg_scale,
        .exp_avg_sq_scale = state->exp_avg_sq_scale,
        .grad = arrays->grad,
        .n = n,
        .layout = kind % SWAP_NUM_LAYOUTS,
        .grad_float = kind % SWAP_NUM_FLOATS,
        .decay_mode = kind % SWAP_NUM_DECAYS,
        .moments = kind / SWAP_NUM_LAYOUTS % SWAP_NUM_MOMENTS,
        .parameter = 7,
        .step = 3,
        .decay = 0.99f,
        .grad_scale = 1.0f,
        .one_minus_beta1 = 0.1f,
        .beta2 = 0.999f,
        .one_minus_beta2 = 0.001f,
        .bias2_sqrt = 0.5f,
        .eps = 1e-8f,
        .minus_step_size = -1e-3f,
    };
}

static void step(struct arrays *arrays, int64_t n, int kind, int threads) {
    const struct swap_adam job = job_of(arrays, &arrays->state, n, kind);
    const struct swap_adam aside = job_of(arrays, &arrays->aside, n, kind);
    check(!swap_adam_step(&aside, &job, threads), "a step from elsewhere is refused");
    check(!swap_adam_step(&job, NULL, threads), "a step is refused");
    check(!memcmp(&arrays->aside, &arrays->state, sizeof arrays->state), "a step differs aside");
    check(!swap_split(arrays->grad, arrays->hi, arrays->lo, n, threads), "a split is refused");
    check(!swap_merge(arrays->hi, arrays->lo, arrays->merged, n, threads), "a merge is refused");
    check(!swap_sum_of_squares(arrays->grad, SWAP_F32, n, arrays->copy, &arrays->sum, threads),
          "a sum is refused");
    check(!swap_copy(arrays->merged, arrays->copy, n * 4 - 1, threads), "a copy is refused");
}

static void *call(void *number) {
    const uint32_t seed = (uint32_t)(uintptr_t)number;
    struct arrays *many = malloc(sizeof *many), *one = malloc(sizeof *one);
    check(many && one, "no memory");
    swap_use_pool();
    for (int round = 0; round < rounds; round++) {
        const int kind = (int)seed * rounds + round;
        const int64_t n = MOST - round * 9973 % MOST;
        fill(many, seed + (uint32_t)round);
        fill(one, seed + (uint32_t)round);
        step(many, n, kind, NUM_THREADS);
        step(one, n, kind, 1);
        check(!memcmp(many, one, sizeof *many), "the bits differ");
    }
    free(many);
    free(one);
    atomic_fetch_sub(&callers_left, 1);
    return NULL;
}

static void *change_isa(void *unused) {
    int isa = 0;
    (void)unused;
    while (atomic_load(&callers_left)) {
        isa = swap_isa_name(isa + 1) ? isa + 1 : 0;
        check(!swap_set_isa(isa), "an instruction set is refused");
        usleep(500);
    }
    return NULL;
}

/* While others compute: a child has none of their threads, and whatever they held is held. */
static void fork_one(void) {
    const pid_t child = fork();
    check(child >= 0, "no child");
    if (!child) {
        rounds = 1;
        call((void *)99);
        _exit(0);
    }
    int status;
    check(waitpid(child, &status, 0) == child && !status, "a child did not end well");
}

int main(int argc, char **argv) {
    pthread_t callers[NUM_CALLERS], changer;
    check(argc == 3, "harness ROUNDS CHILDREN");
    rounds = atoi(argv[1]);
    atomic_store(&callers_left, NUM_CALLERS);
    for (uintptr_t i = 0; i < NUM_CALLERS; i++)
        check(!pthread_create(&callers[i], NULL, call, (void *)i), "no thread");
    check(!pthread_create(&changer, NULL, change_isa, NULL), "no thread");
    for (int i = 0; i < atoi(argv[2]); i++)
        fork_one();
    for (int i = 0; i < NUM_CALLERS; i++)
        pthread_join(callers[i], NULL);
    pthread_join(changer, NULL);
    return 0;
}
