/* A whole worker in C. */

#ifndef LMHEAD_TESTS_C_C_WORKER_H_
#define LMHEAD_TESTS_C_C_WORKER_H_

#ifdef __cplusplus
extern "C" {
#endif

/* Creates head "lm" of 8 x 4, trains one step on three rows and reads the weight back. Returns 0,
 * or the line that failed with its error in `message`. *loss_sum is the step's. */
int RunCWorker(const char* address, double* loss_sum, float weight[32], char message[1024]);

#ifdef __cplusplus
}
#endif

#endif /* LMHEAD_TESTS_C_C_WORKER_H_ */
