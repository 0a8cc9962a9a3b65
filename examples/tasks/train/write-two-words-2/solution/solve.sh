#!/bin/bash
echo mountain bronze > cloud.txt
